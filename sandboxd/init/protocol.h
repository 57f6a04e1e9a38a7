/*
 * protocol.h - what the launcher and the daemon say to the zygote and to a sandbox's PID 1.
 *
 * One SOCK_SEQPACKET datagram is one message: a struct msg, then `len` bytes of payload, with file
 * descriptors beside it (SCM_RIGHTS) in the order given below. Host byte order: both ends are one
 * machine. protocol.py mirrors this file, and tests/unit/test_protocol.py compares the two by
 * compiling it.
 *
 *   launcher ---- Z_CLONE -------------------------------> zygote     fds: control socket, [cgroup dir]
 *            <--- Z_CLONED (pid or errno) ---------------- zygote     fds: pidfd
 *
 *   launcher ---- M_SETUP --------------------------------> PID 1     fds: cgroup2 dir, v1 tasks...,
 *                                                                          or none: no cgroups
 *            <--- R_DONE | R_FAILED -------------------------           fds: its mount namespace
 *            ---- M_ROOT --------------------------------->           fds: overlay mount, [host mounts]
 *            <--- R_DONE | R_FAILED -------------------------
 *            ---- M_VIEWS -------------------------------->           fds: a mount for each path
 *            <--- R_DONE | R_FAILED -------------------------
 *            ---- M_ATTACH ------------------------------->           fds: one end of a new control socket
 *            ---- M_FILTER ------------------------------->           struct sock_filter[]: one more, for
 *            <--- R_DONE | R_FAILED -------------------------         every exec from here on
 *
 *   any control socket of this PID 1 (the launcher's own or an attached one):
 *            ---- M_EXEC --------------------------------->           fds: [payload memfd]
 *            <--- R_STARTED ------------------------------            fds: stdout, [stderr], [stdin],
 *                                                                          [status]; or the terminal
 *            <--- R_EXIT ---------------------------------
 *            ---- M_FILE --------------------------------->           fds: data pipe, [report pipe]
 *            <--- R_EXIT ---------------------------------
 *            ---- M_KILL --------------------------------->
 *            <--- R_GONE ---------------------------------  (tree and SIGKILL only, when none is left)
 *            ---- M_SOCKET ------------------------------->
 *            <--- R_DONE | R_FAILED -----------------------           fds: the socket
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
/* Mounts of the host's in one sandbox, and the bytes of all their targets with their NULs. */
#define HOST_MOUNTS_MAX  8
#define HOST_TARGETS_MAX 4096
/* With EXEC_STATUS; a digit, as more a POSIX shell does not take in a redirection. */
#define STATUS_FD 9

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
    M_SOCKET = 23,
    M_FILTER = 24,
    M_VIEWS = 25,
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
    uint32_t map_count;  /* a sandbox's id map is "0 0 map_count"; 1: it is the only id there is */
    uint32_t map_last;   /* one id more that is mapped to itself; 0: none */
    uint32_t filter_len; /* bytes */
    uint32_t no_cgroups; /* 1: Z_CLONE and M_SETUP come without */
    uint64_t
        token[2];  /* [0] low: args[4], [1] high: args[5]; what lets PID 1 past its own filter */
    uint64_t caps; /* bounding set, and what the sandbox's root holds */
};

/* Z_CLONED */
struct zygote_cloned {
    int32_t pid; /* in the pid namespace of the node */
    int32_t err; /* errno; then there is no pidfd */
};

/* M_ROOT: then nothing, or NUL-terminated strings: the host name ("" where it is that of M_SETUP),
 * and for each fd after the first where it goes: a path relative to the root, which must be there.
 * Such mounts are given once, and go with the sandbox from root to root. */
enum root_flags {
    ROOT_IDLE = 1 << 0, /* refused (STEP_ROOT_BUSY) while a process but PID 1 lives */
    ROOT_KILL = 1 << 1, /* all processes but PID 1 are killed first */
};

/* M_SETUP: then the host name, NUL-terminated, then `sysctl_count` pairs of NUL-terminated strings
 * (path below /proc/sys, value), tried in order; a missing file is passed over when the path starts
 * with '?'. Then the paths to mask, `mask_count` NUL-terminated strings relative to the root
 * ("proc/kcore"); missing ones are passed over. Then `readonly_count` likewise. */
struct setup {
    uint32_t cgroup_v1_count; /* fds of v1 `tasks` after the first fd */
    uint32_t shm_bytes_mb;
    uint32_t shm_inodes;
    uint32_t dev_inodes;
    uint32_t pty_max;
    uint32_t pending_signals; /* RLIMIT_SIGPENDING of every command; the next two likewise */
    uint32_t memlock_kb;
    uint32_t msgqueue_kb;
    uint32_t sysctl_count;
    uint32_t mask_count;
    uint32_t readonly_count;
};

/* M_VIEWS: a NUL-terminated path for each fd, below /proc or /sys ("proc/meminfo"): the mount goes
 * over it, in the place of the one of an earlier M_VIEWS. A path that this kernel does not have is
 * passed over. */

enum exec_flags {
    EXEC_PAYLOAD_FD = 1 << 0, /* the payload is in the memfd that comes as the first fd */
    EXEC_STDIN = 1 << 1,      /* make a pipe for stdin; else it is /dev/null */
    EXEC_DETACH = 1 << 2,     /* outlives the control socket that asked for it */
    EXEC_SHELL = 1 << 3,      /* argv[0] is a script: run by the sandbox's bash, else sh, with -c */
    EXEC_LOGIN = 1 << 4,      /* with EXEC_SHELL: a login shell */
    EXEC_CWD_CREATE = 1 << 5, /* make the working directory if it is missing */
    EXEC_MERGE_STDERR = 1 << 6,
    EXEC_TTY = 1 << 7, /* a terminal instead of pipes, its controlling one; R_STARTED brings the
                             master, and EXEC_STDIN and EXEC_MERGE_STDERR do not count */
    EXEC_STATUS =
        1 << 8, /* one more pipe, whose write end is descriptor STATUS_FD of the command */
};

/* M_EXEC: then NUL-terminated strings: user ("name|uid[:name|gid]"), cwd, argv..., env... */
struct exec_req {
    uint32_t argc;
    uint32_t envc;
    uint32_t nofile; /* RLIMIT_NOFILE, soft and hard */
    uint32_t umask;
    uint32_t tty_size; /* EXEC_TTY: columns in the low half, rows in the high one */
};

enum file_op {
    FILE_READ = 1,  /* a regular file -> data pipe */
    FILE_WRITE = 2, /* data pipe -> a regular file, put in its place when it is whole */
    FILE_STAT = 3,  /* one entry -> data pipe, if there is one */
    FILE_LIST = 4,  /* entries below a directory that the filters let through -> data pipe */
    FILE_MKDIR = 5,
    FILE_REMOVE = 6,
    FILE_MOVE = 7, /* to `other` */
    FILE_CHMOD = 8,
    FILE_CHOWN = 9, /* to `other`: "name|uid[:name|gid]"; without a group only the owner changes */
    FILE_PACK = 10, /* a directory's content -> data pipe, as a tar */
    FILE_UNPACK = 11, /* data pipe, a tar -> into a directory */
};

enum file_flags {
    FILE_PARENTS =
        1 << 0,         /* make missing parent directories; FILE_MKDIR: one that is there is fine */
    FILE_MODE = 1 << 1, /* `mode` is given; else what the replaced file had, or 0644 */
    FILE_ENTRY = 1 << 2, /* FILE_READ: an entry comes before the bytes */
    FILE_CHUNKED =
        1 << 3,           /* FILE_WRITE: the data are chunks, each after its uint32_t length, to one
                                 of 0; `length` is the most they may have in all */
    FILE_FOLLOW = 1 << 4, /* FILE_STAT: a symlink's target */
    FILE_RECURSIVE = 1 << 5,  /* FILE_REMOVE, FILE_CHMOD, FILE_CHOWN */
    FILE_REPLACE = 1 << 6,    /* FILE_MOVE: what is at the destination */
    FILE_OWNERS = 1 << 7,     /* FILE_UNPACK: as the archive says, by number; else the user's */
    FILE_SUFFIX = 1 << 8,     /* FILE_READ: the last `length` bytes */
    FILE_UNREADABLE = 1 << 9, /* FILE_PACK: pass over what the user may not read */
};

#define PATTERNS_MAX 64
/* Of the name of one entry, below the path that was asked for: what does not fit a struct has no
 * name by which it could be asked for. */
#define ENTRY_PATH_MAX 4096

/* M_FILE: then NUL-terminated strings: user, path, other ("" if there is none), patterns (first
 * those to include, then those to exclude). Fds: the data pipe, then for FILE_PACK and FILE_UNPACK a
 * pipe for the entry that tells where it failed. */
struct file_req {
    uint32_t op;
    uint32_t flags;
    uint32_t mode;
    uint32_t depth;    /* levels below the path, at most */
    uint64_t offset;   /* of a read */
    uint64_t length;   /* of a read at most; of a write exactly: a shorter stream is discarded;
                        FILE_PACK, FILE_UNPACK: of file content at most */
    uint64_t entries;  /* at most: given out, taken in, changed */
    uint64_t size_min; /* FILE_LIST's filters, inclusive */
    uint64_t size_max;
    int64_t mtime_min_ns;
    int64_t mtime_max_ns;
    uint32_t types; /* bits 1 << (st_mode >> 12) */
    uint32_t include_count;
    uint32_t exclude_count;
    uint32_t reserved;
};

/*
 * A file on the data pipe: this, then `path_len` bytes of its path below the one that was asked for
 * (none for itself), then `target_len` bytes of where a symlink leads.
 *
 * `err` is why a directory could not be read, or of the last entry of an operation that failed what
 * happened there. E2BIG and no path: a bound ended the list before its end.
 */
struct file_entry {
    uint32_t err;
    uint32_t mode; /* with its type, as in stat(2) */
    uint32_t uid;
    uint32_t gid;
    uint32_t nlink;
    uint32_t path_len;
    uint32_t target_len;
    uint32_t reserved;
    uint64_t size;
    uint64_t inode;
    int64_t mtime_ns;
};

/* Why STEP_ARCHIVE failed, as its index. */
enum archive_flaw {
    ARCHIVE_TRUNCATED = 1,
    ARCHIVE_HEADER, /* no tar at all, or a header that was damaged */
    ARCHIVE_NUMBER, /* a number that is none, or that has no meaning where it is */
    ARCHIVE_NAME,   /* absolute, with "..", empty, too long or too deep */
    ARCHIVE_LINK,   /* to what is not in the target directory, or beneath a symlink */
    ARCHIVE_EXTENSION,
    ARCHIVE_TYPE, /* a device, a sparse file, part of a volume ... */
    ARCHIVE_ENTRIES,
    ARCHIVE_SIZE,
    ARCHIVE_IN_THE_WAY, /* what is there already is no directory, or is one */
};

/* KILL_CHILDREN: all but the main process; what is forked meanwhile may be missed. */
enum kill_scope { KILL_MAIN = 1, KILL_TREE = 2, KILL_CHILDREN = 3 };

/* M_KILL */
struct kill_req {
    uint32_t signal;
    uint32_t scope;
};

/* M_SOCKET: a TCP socket of the sandbox's network namespace, close-on-exec and non-blocking, which is
 * whose it is wherever it is used: nothing of the sandbox runs to make it. */
struct socket_req {
    uint32_t family; /* AF_INET or AF_INET6 */
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
    STEP_FILE_TREE,    /* one entry of a tree; where it is stands in the last file_entry */
    STEP_FILE_BOUND,   /* 0: entries, 1: bytes, 2: levels */
    STEP_FILE_CHANGED, /* by another process while it was being read, moved or removed */
    STEP_ARCHIVE,
    STEP_TTY,
    STEP_SOCKET,
    STEP_VIEW,         /* of PID 1; which path of M_VIEWS */
    STEP_MOUNT_TARGET, /* of PID 1; which of the host mounts */
    STEP_MOUNT_MOVE,
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
    uint32_t pid;    /* in the sandbox's pid namespace */
    uint32_t cgroup; /* its cgroup is "e<cgroup>" in the sandbox's: for a kill from outside */
};

/* R_EXIT: `status` as wait4(2) gives it. With failure.step other than STEP_NONE the command did not
 * run (but for STEP_EXEC: then it is 127 or 126, and was told on its stderr). */
struct exited {
    struct failure failure;
    int32_t status;
    uint32_t mode; /* FILE_READ, FILE_WRITE, FILE_STAT: the file as it was read or as it is now */
    uint32_t uid;
    uint32_t gid;
    uint64_t size; /* other file operations: how many entries they gave out, took in or changed */
    int64_t mtime_ns;
    uint64_t user_us;
    uint64_t system_us;
    uint64_t maxrss_kb;
};

#endif
