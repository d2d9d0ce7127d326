"""A run's maps and windows in the formats of slide viewers, geographic information systems and archives."""
