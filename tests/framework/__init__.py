"""What the tests share: tiers, feature probes, the leak check, a daemon to talk to, images."""
