"""Loading and wrapping of models: target layer, layout, preprocessing, class names."""
