#!/bin/bash
# slurm_here.sh FOLDER COMMAND...: run a command beside a Slurm of one node, in namespaces of their own: network, processes, mounts.
# Ray's launcher ends with `ray stop`, which would end all of Ray on this machine. Needs root, slurm-wlm and munge.
folder=$1; shift
export folder
exec unshare -n -p -m -f --mount-proc --kill-child bash -c '
set -e
mount --make-rprivate /
mkdir -p "$folder"/{state,spool,ray,run,etc,munge} /tmp/ray /run/munge /etc/munge /etc/slurm
mount --bind "$folder/ray" /tmp/ray
mount --bind "$folder/etc" /etc/slurm
mount --bind "$folder/munge" /run/munge
ip link set lo up; ip link add eth0 type veth peer name eth1; ip link set eth1 up; ip addr add 10.77.0.1/24 dev eth0; ip link set eth0 up
host=$(hostname)
cat >/etc/slurm/slurm.conf <<END
ClusterName=klear
SlurmctldHost=$host(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=20
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=10.77.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
head -c 1024 /dev/urandom >"$folder/munge.key"; chmod 600 "$folder/munge.key"; chmod 755 "$folder/munge"
munged --force --key-file="$folder/munge.key" --socket=/run/munge/munge.socket --pid-file="$folder/run/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
slurmctld
slurmd
exec "$@"
' slurm "$@"
