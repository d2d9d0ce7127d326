"""Where parts are computed when one process on one device is not enough: several devices here, or a Ray cluster."""
