"""Read, judge again and count stored answers, whoever sampled them."""
