"""Rasters: slides, georeferenced images and other files too large or too deep to be one picture, read in windows."""
