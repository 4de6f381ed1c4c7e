"""What runs inside the vendor's image and container: standard library only, beside the packaging tools themselves."""
