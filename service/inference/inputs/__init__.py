"""From wire values to what the engine takes."""
