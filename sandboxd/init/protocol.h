/*
 * protocol.h - what the launcher and the daemon say to the zygote and to a sandbox's PID 1.
 *
 * One SOCK_SEQPACKET datagram is one message: a struct msg, then `len` bytes of payload, with file
 * descriptors beside it (SCM_RIGHTS) in the order given below. Host byte order: both ends are one
 * machine. protocol.py mirrors this file, and tests/unit/test_protocol.py compares the two by
 * compiling it.
 *
 *   launcher ---- Z_CLONE -------------------------------> zygote     fds: control socket, cgroup dir
 *            <--- Z_CLONED (pid or errno) ---------------- zygote     fds: pidfd
 *
 *   launcher ---- M_SETUP --------------------------------> PID 1     fds: cgroup2 dir, v1 cgroup.procs...
 *            <--- R_DONE | R_FAILED -------------------------
 *            ---- M_ROOT --------------------------------->           fds: overlay mount
 *            <--- R_DONE | R_FAILED -------------------------
 *            ---- M_ATTACH ------------------------------->           fds: one end of a new control socket
 *
 *   any control socket of this PID 1 (the launcher's own or an attached one):
 *            ---- M_EXEC --------------------------------->           fds: [payload memfd]
 *            <--- R_STARTED ------------------------------            fds: stdout, stderr, [stdin]
 *            <--- R_EXIT ---------------------------------
 *            ---- M_FILE --------------------------------->           fds: data pipe
 *            <--- R_EXIT ---------------------------------
 *            ---- M_KILL --------------------------------->
 *            <--- R_GONE ---------------------------------  (tree and SIGKILL only, when none is left)
 *
 * `id` is chosen by whoever asks and is unique on its own socket. When a control socket closes, what
 * was started over it is killed, but for execs with EXEC_DETACH. When the launcher's closes, PID 1
 * exits and the whole sandbox with it.
 */
#ifndef SANDBOXD_PROTOCOL_H
#define SANDBOXD_PROTOCOL_H

#include <stdint.h>

#define PROTOCOL_VERSION 1

/* A datagram must fit a default socket buffer (net.core.wmem_default, 212,992) with room to spare. */
#define MSG_MAX 65536
/* Above MSG_MAX a payload comes in a memfd; the kernel's own limit of argv + envp is 2 MiB. */
#define PAYLOAD_MAX (4u << 20)
#define MSG_FDS_MAX 16
/* Execs and file operations at once in one sandbox. */
#define EXECS_MAX     512
#define CLIENTS_MAX   8
#define CGROUP_V1_MAX 8

enum msg_type {
    Z_INIT = 1,
    Z_CLONE = 2,
    M_SETUP = 16,
    M_ROOT = 17,
    M_ATTACH = 18,
    M_EXEC = 19,
    M_FILE = 20,
    M_KILL = 21,
    M_PING = 22,
    Z_READY = 64,
    Z_CLONED = 65,
    R_DONE = 80,
    R_FAILED = 81,
    R_STARTED = 82,
    R_EXIT = 83,
    R_GONE = 84,
};

struct msg {
    uint32_t type;
    uint32_t id;
    uint32_t len;
    uint32_t flags;
};

/* Z_INIT, once: then `filter_len` bytes of struct sock_filter[]. Answered by Z_READY. */
struct zygote_init {
    uint32_t version;    /* PROTOCOL_VERSION */
    uint32_t id;         /* the uid and gid of zygote and PID 1, unmapped in every sandbox */
    uint32_t map_count;  /* a sandbox's id map is "0 0 map_count" */
    uint32_t filter_len; /* bytes */
    uint64_t
        token[2];  /* [0] low: args[4], [1] high: args[5]; what lets PID 1 past its own filter */
    uint64_t caps; /* bounding set, and what the sandbox's root holds */
};

/* Z_CLONED */
struct zygote_cloned {
    int32_t pid; /* in the pid namespace of the node */
    int32_t err; /* errno; then there is no pidfd */
};

/* M_ROOT: then, where it is not that of M_SETUP, the host name, NUL-terminated. */
enum root_flags {
    ROOT_IDLE = 1 << 0, /* refused (STEP_ROOT_BUSY) while a process but PID 1 lives */
    ROOT_KILL = 1 << 1, /* all processes but PID 1 are killed first */
};

/* M_SETUP: then the host name, NUL-terminated, then `sysctl_count` pairs of NUL-terminated strings
 * (path below /proc/sys, value), tried in order; a missing file is passed over when the path starts
 * with '?'. Then the paths to mask, `mask_count` NUL-terminated strings relative to the root
 * ("proc/kcore"); missing ones are passed over. Then `readonly_count` likewise. */
struct setup {
    uint32_t cgroup_v1_count; /* cgroup.procs fds after the first fd */
    uint32_t shm_bytes_mb;
    uint32_t shm_inodes;
    uint32_t dev_inodes;
    uint32_t pty_max;
    uint32_t sysctl_count;
    uint32_t mask_count;
    uint32_t readonly_count;
};

enum exec_flags {
    EXEC_PAYLOAD_FD = 1 << 0, /* the payload is in the memfd that comes as the first fd */
    EXEC_STDIN = 1 << 1,      /* make a pipe for stdin; else it is /dev/null */
    EXEC_DETACH = 1 << 2,     /* outlives the control socket that asked for it */
    EXEC_SHELL = 1 << 3,      /* argv[0] is a script: run by the sandbox's bash, else sh, with -c */
    EXEC_LOGIN = 1 << 4,      /* with EXEC_SHELL: a login shell */
    EXEC_CWD_CREATE = 1 << 5, /* make the working directory if it is missing */
    EXEC_MERGE_STDERR = 1 << 6,
    EXEC_TTY = 1 << 7, /* reserved */
};

/* M_EXEC: then NUL-terminated strings: user ("name|uid[:name|gid]"), cwd, argv..., env... */
struct exec_req {
    uint32_t argc;
    uint32_t envc;
    uint32_t nofile; /* RLIMIT_NOFILE, soft and hard */
    uint32_t umask;
};

enum file_op {
    FILE_READ = 1,  /* path -> data pipe */
    FILE_WRITE = 2, /* data pipe -> a temporary file beside path, then renamed over it */
    FILE_STAT = 3,
};

enum file_flags {
    FILE_PARENTS = 1 << 0, /* make missing parent directories */
    FILE_MODE = 1 << 1,    /* `mode` is given; else what the replaced file had, or 0644 */
};

/* M_FILE: then NUL-terminated strings: user, path. */
struct file_req {
    uint32_t op;
    uint32_t flags;
    uint32_t mode;
    uint32_t reserved;
    uint64_t offset; /* of a read */
    uint64_t length; /* of a read at most; of a write exactly: a shorter stream is discarded */
};

enum kill_scope { KILL_MAIN = 1, KILL_TREE = 2 };

/* M_KILL */
struct kill_req {
    uint32_t signal;
    uint32_t scope;
};

/* Where a set-up failed. STEP_NONE means it did not. `index` says which of several. */
enum step {
    STEP_NONE = 0,
    /* PID 1 */
    STEP_MESSAGE,
    STEP_CGROUP,
    STEP_CGROUP_NS,
    STEP_HOSTNAME,
    STEP_LOOPBACK,
    STEP_PROPAGATION,
    STEP_STAGE,
    STEP_PROC,
    STEP_SYS,
    STEP_DEV,
    STEP_DEV_NODE,
    STEP_DEV_PTS,
    STEP_DEV_SHM,
    STEP_DEV_MQUEUE,
    STEP_SYSCTL,
    STEP_MASK,
    STEP_READONLY,
    STEP_CAPABILITIES,
    STEP_SECCOMP,
    STEP_ROOT_BUSY,
    STEP_ROOT_TARGET,
    STEP_ROOT_ATTACH,
    STEP_ROOT_MOVE,
    STEP_ROOT_PIVOT,
    STEP_ROOT_DETACH,
    /* a child of PID 1, before it execs or while it does a file operation */
    STEP_TABLE_FULL,
    STEP_EXEC_CGROUP,
    STEP_CLONE,
    STEP_OOM_SCORE,
    STEP_USER,
    STEP_GROUP,
    STEP_PIPES,
    STEP_STARTED,
    STEP_STDIN,
    STEP_RLIMIT,
    STEP_CREDENTIALS,
    STEP_CWD,
    STEP_EXEC,
    STEP_FILE_OPEN,
    STEP_FILE_TYPE,
    STEP_FILE_READ,
    STEP_FILE_WRITE,
    STEP_FILE_RENAME,
    STEP_FILE_LENGTH,
    STEP_DATA_PIPE,
    STEP_COUNT
};

/* R_FAILED: a set-up step of PID 1 or of a child that never started. */
struct failure {
    uint32_t step;
    uint32_t index;
    int32_t err;
    uint32_t reserved;
};

/* R_STARTED */
struct started {
    uint32_t pid; /* in the sandbox's pid namespace */
    uint32_t reserved;
};

/* R_EXIT: `status` as wait4(2) gives it. With failure.step other than STEP_NONE the command did not
 * run (but for STEP_EXEC: then it is 127 or 126, and was told on its stderr). */
struct exited {
    struct failure failure;
    int32_t status;
    uint32_t mode; /* file operations: the file as it was read or as it is now */
    uint32_t uid;
    uint32_t gid;
    uint64_t size;
    int64_t mtime_ns;
    uint64_t user_us;
    uint64_t system_us;
    uint64_t maxrss_kb;
};

#endif
