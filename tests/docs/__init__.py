"""What README.md and docker/README.md tell people to type."""
