"""What is measured of a map and, in `stats`, over images."""
