"""Rasters: slides, georeferenced images and other files too large or too deep to be one image, read in windows."""
