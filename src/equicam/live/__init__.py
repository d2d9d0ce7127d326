"""The live look: a local page that explains an image while a dial rotates it."""
