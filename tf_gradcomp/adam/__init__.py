"""Division of gradients by Adam's second moment before compression."""
