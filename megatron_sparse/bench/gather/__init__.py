"""`bench gather`: the all-gather of updated parameters, raw and exact, between ranks."""
