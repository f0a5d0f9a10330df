"""The files in docker/: images, deployment, dashboard, the operator's page."""
