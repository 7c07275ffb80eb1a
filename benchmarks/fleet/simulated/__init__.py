"""Fleet benchmarks on a fake clock: routing, journal and scaling, without engines or servers."""
