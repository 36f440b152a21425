"""Gradient compression: codecs, and compressors that average gradients over ranks."""
