"""What no policy can beat: limits to compare results with."""
