"""The wire message: headers, records, and the codecs that make and read them."""
