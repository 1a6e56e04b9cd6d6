"""The typed configuration: the only place where defaults live."""
