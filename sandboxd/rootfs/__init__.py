"""What a sandbox's root is made of: overlay and writable layer, kernel files and what is masked."""
