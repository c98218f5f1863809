"""Local steps: workers take several steps on their own weights between two exchanges."""
