"""Programs that run inside the vendor's image and container: standard library only, beside the packaging tools."""
