"""The published experiments, run again on the public interface of equifed."""
