"""Models as readers see them: a module, its target layer, layout, preprocessing and class names."""
