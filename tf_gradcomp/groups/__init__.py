"""The replicas that exchange gradients, and how they communicate."""
