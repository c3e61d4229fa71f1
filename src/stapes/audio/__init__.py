"""From files to 16 kHz samples, features and speech regions."""
