"""Adam's second moment in front of compressors."""
