# What Klear's code judge asks of firejail, as a profile: to look at, and to try by hand as an ordinary user with
#     firejail --profile=infra/firejail/klear.profile --private /usr/bin/python3 -I -S
# The judge passes the same options on the command line (klear_core/verify/sandbox/jail_command.py; a test holds the two together),
# with the limits of verify.limits.* and a blacklist of every top-level folder that an interpreter does not need.
private-tmp
private-dev
no3d
net none
protocol unix
seccomp socket,io_uring_setup,io_uring_enter,io_uring_register,memfd_secret
caps.drop all
nonewprivs
noroot
nogroups
ipc-namespace
restrict-namespaces
hostname sandbox
read-only /tmp
read-only /var/tmp
read-only /dev/shm
read-only /run/lock
read-only ${HOME}
rlimit-nproc 64
rlimit-nofile 64
