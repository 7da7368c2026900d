"""What no policy can beat: physical limits to compare results with."""
