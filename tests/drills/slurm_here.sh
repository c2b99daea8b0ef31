#!/bin/bash
# slurm_here.sh FOLDER NODES COMMAND...: run a command beside a Slurm controller and nodes n1, n2, ..., each in namespaces of its own: network,
# processes, mounts, host name. Ray's launcher ends with `ray stop`, which would end all of Ray on this machine. Needs root, slurm-wlm and munge.
# With ACCOUNTING=enforce, also slurmdbd on a MariaDB of its own, with the QOS `high` and `small` (of one node); ACCOUNTING=kept enforces none of it.
folder=$1 nodes=$2; shift 2
export folder nodes
exec unshare -n -p -m -f --mount-proc --kill-child bash -c '
set -e
mount --make-rprivate /
mkdir -p "$folder"/{state,run,etc,munge,pids} /run/munge /etc/munge /etc/slurm
mount --bind "$folder/etc" /etc/slurm
mount --bind "$folder/munge" /run/munge
ip link set lo up; ip link add br0 type bridge; ip addr add 10.77.0.254/24 dev br0; ip link set br0 up
host=$(hostname)
cat >/etc/slurm/slurm.conf <<END
ClusterName=klear
SlurmctldHost=$host(10.77.0.254)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=20
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
$(for i in $(seq $nodes); do echo "NodeName=n$i NodeAddr=10.77.0.$i CPUs=4 Gres=gpu:1 State=UNKNOWN"; done)
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=first Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
END
echo "Name=gpu File=/dev/null" >/etc/slurm/gres.conf   # it only has to exist
echo "127.0.0.1 localhost" >"$folder/hosts"; echo "10.77.0.254 $host" >>"$folder/hosts"
for i in $(seq $nodes); do echo "10.77.0.$i n$i" >>"$folder/hosts"; done
mount --bind "$folder/hosts" /etc/hosts
head -c 1024 /dev/urandom >"$folder/munge.key"; chmod 600 "$folder/munge.key"; chmod 755 "$folder/munge"
munged --force --key-file="$folder/munge.key" --socket=/run/munge/munge.socket.2 --pid-file="$folder/run/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
if [ -n "$ACCOUNTING" ]; then
  (mariadb-install-db --no-defaults --user=root --datadir="$folder/db" --auth-root-authentication-method=normal --skip-test-db
  mariadbd --no-defaults --user=root --datadir="$folder/db" --socket="$folder/run/db" --bind-address=127.0.0.1 --innodb-lock-wait-timeout=900 &
  until mariadb --no-defaults --socket="$folder/run/db" -e "CREATE USER slurm@127.0.0.1; GRANT ALL ON slurm_acct_db.* TO slurm@127.0.0.1"; do sleep 0.2; done
  cat >/etc/slurm/slurmdbd.conf <<END
DbdHost=localhost
AuthType=auth/munge
SlurmUser=root
LogFile=$folder/slurmdbd.log
PidFile=$folder/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
END
  chmod 600 /etc/slurm/slurmdbd.conf
  cat >>/etc/slurm/slurm.conf <<END
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
PriorityType=priority/multifactor
PriorityWeightQOS=1000
$([ "$ACCOUNTING" = enforce ] && echo AccountingStorageEnforce=associations,limits,qos)
END
  slurmdbd
  until sacctmgr -i add cluster klear; do sleep 0.2; done
  sacctmgr -i add qos high set Priority=1000
  sacctmgr -i add qos small set MaxTRESPerJob=node=1 Flags=DenyOnLimit
  sacctmgr -i add account us
  sacctmgr -i add user root account=us qos=normal,high,small
  ) >"$folder/accounting.log" 2>&1
fi
slurmctld
for i in $(seq $nodes); do
  ip link add v$i type veth peer name w$i; ip link set v$i master br0 up
  unshare -n -p -m -u -f --mount-proc --kill-child bash -c "
    hostname n$i; mkdir -p $folder/ray$i /tmp/ray
    mount --bind $folder/ray$i /tmp/ray; mount -t tmpfs -o size=2g tmpfs /dev/shm
    until ip link show w$i >/dev/null 2>&1; do sleep 0.1; done
    ip link set lo up; ip link set w$i name eth0; ip addr add 10.77.0.$i/24 dev eth0; ip link set eth0 up; ip route add default via 10.77.0.254
    slurmd -N n$i; while sleep 1; do :; done" &   # the first process of a node collects zombies
  until inside=$(pgrep -P $!); do sleep 0.1; done
  echo $inside >"$folder/pids/n$i"
  ip link set w$i netns $inside
done
exec "$@"
' slurm "$@"
