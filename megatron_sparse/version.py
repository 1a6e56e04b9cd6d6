"""The version: below every other module, so that each can write it into what it records."""

__version__ = "0.1.0"
