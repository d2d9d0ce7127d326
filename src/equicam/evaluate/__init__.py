"""Metrics of saliency maps, one row per image, and statistics over the rows."""
