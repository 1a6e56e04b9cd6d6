"""`bench node`: messages and sums between the ranks of this host, beside gloo's over loopback."""
