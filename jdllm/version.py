"""The version, importable from any floor."""

__version__ = "0.1.0"
