"""sandboxd in Slurm jobs: one daemon on every node of a job, for as long as the job lasts.

::

    sandboxd slurm launch -N 3          sbatch deploy/slurm/sandboxd.sbatch
       waits for the files                 |  batch script: makes the job's directory, asks for
            ^                              |  the job's end, srun on every node, removes it
            |                              v
       BASE/JOB/NODE.json  <---------   sandboxd slurm node      (``step``, one a node)
       BASE/JOB/NODE.json  <---------     holds the listening socket; starts `serve`, again where
            ^                             it dies; publishes; takes everything away at the end
            |
       Client.from_slurm, sandboxd slurm status | stop

``step``       what runs on a node: the daemon's start, watch and end
``publish``    the file on shared storage, written and removed; its format is ``client.slurm``
``instances``  directories on the node's own disk, a job and a node each; the sweep of dead ones
``jobs``       sbatch, scancel, scontrol

Who tells whom that it is over: Slurm sends SIGTERM to all of a job's processes at its end
(scancel, time limit, requeue), and SIGKILL after KillWait. A node that Slurm has lost and that has
lost Slurm looks at its own file: where that is gone, the job is over. What SIGKILL leaves
(cgroups, a directory) goes with the next step on the node or with the epilog, deploy/slurm/epilog.

Before the job's time is up the daemon drains by itself (``drain_before_end_s``), as the batch
script gives it SLURM_JOB_END_TIME, which only Slurm from 23.02 sets itself.
"""
