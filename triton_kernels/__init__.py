"""Triton kernels, one file for each op: kernel and launcher. Imported only where Triton is used."""
