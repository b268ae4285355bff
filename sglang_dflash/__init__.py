"""DDTree verification of DFlash drafts, as a plugin for stock SGLang."""

__version__ = "0.1.0"
