"""OCI images as a source: what is in a layout directory, verified, as layers to merge."""
