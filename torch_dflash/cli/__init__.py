"""The command ``torch-dflash``."""
