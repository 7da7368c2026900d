"""What no policy can beat: physical limits to hold results against."""
