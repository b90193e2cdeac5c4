"""One page that people would rather look at than read: plain HTML, charts as inline SVG."""
