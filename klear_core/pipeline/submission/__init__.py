"""Files that start a run on a cluster: Slurm, Ray, Kubernetes, Prefect."""
