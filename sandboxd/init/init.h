/*
 * init.h - what the C files of sandbox_init share.
 *
 * Not part of any protocol (that is protocol.h). Mechanism only: each decision was made in Python
 * and arrived as a message. No stdio and no malloc: PID 1 must stay small and cannot fail for
 * memory.
 */
#ifndef SANDBOXD_INIT_H
#define SANDBOXD_INIT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "protocol.h"

/* Set once by the zygote, inherited by every PID 1 through the clone. */
struct node {
    uint32_t id;
    uint32_t map_count;
    uint32_t map_last;
    bool no_cgroups;
    bool one_id; /* setgroups(2) is not to be had, nor any id but 0 */
    uint64_t token[2];
    uint64_t caps;
    uint32_t filter_len;
    /* struct sock_filter[], at most BPF_MAXINSNS of 8 bytes. Pages of its own: PID 1 gives them back
     * once it has loaded it (the token is in there too). */
    _Alignas(4096) uint8_t filter[32768];
};
extern struct node node;

/* A message as received: payload NUL-terminated for safety, fds closed on exec. */
struct inbox {
    struct msg head;
    uint8_t payload[MSG_MAX + 1];
    int fds[MSG_FDS_MAX];
    int fd_count;
};

/* What a child of PID 1 leaves in shared memory for it: nothing else comes back but its status. */
struct record {
    struct failure failure;
    uint32_t mode;
    uint32_t uid;
    uint32_t gid;
    uint32_t reserved;
    uint64_t size;
    int64_t mtime_ns;
};

/* Who a child becomes. */
struct user {
    uid_t uid;
    gid_t gid;
    gid_t groups[64];
    size_t group_count;
    char home[PATH_MAX];
};

/* What an M_EXEC asked for; the strings lie in its payload. More than 1 MiB, most of it touched by
 * nobody: only children have one. */
#define ARGS_MAX 65536
struct command {
    struct exec_req req;
    uint32_t flags;
    const char *user;
    const char *cwd;
    const char *argv[ARGS_MAX + 1];
    const char *envp[ARGS_MAX + 2]; /* room for HOME */
};

/* What a child of PID 1 needs beside its message. */
struct child {
    struct record *record;
    int client_fd; /* where R_STARTED goes */
    int root_fd;   /* the sandbox's root, O_PATH */
    int proc_fd;   /* its /proc and /dev as mounted by PID 1, whatever the root holds now */
    int dev_fd;
    uint32_t cgroup;       /* the serial of its exec */
    const uint8_t *filter; /* on top of PID 1's own; NULL: none */
    uint32_t filter_len;
};

/* wire.c */
/* recvmsg(2) flags. 1: a message; 0: end; -1 and errno: EBADMSG for one that was thrown away, of
 * which in->head.id is still what it said, or 0. */
int wire_receive(int fd, struct inbox *in, int flags);
int wire_send(int fd, uint32_t type, uint32_t id, const void *payload, uint32_t len, const int *fds,
              int fd_count, int flags); /* sendmsg(2) flags; 0 or -1 and errno */
void wire_close_fds(struct inbox *in);
/* The next NUL-terminated string of a payload, or NULL. */
const char *wire_string(const uint8_t **cursor, const uint8_t *end);

/* sys.c: what libc has no wrapper for, and the calls that carry the token */
int sys_clone3_child(uint64_t flags, int cgroup_fd, int *pidfd);
int sys_open_tree(int dir_fd, const char *path, unsigned int flags);
int sys_move_mount(int from_fd, int to_fd, const char *to_path);
int sys_pivot_root(const char *new_root, const char *old_root);
int sys_umount_detach(const char *path);
int sys_sethostname(const char *name);
int sys_mount_readonly(int mount_fd);
int sys_mount_sealed(int mount_fd); /* the same, for a device that is to be opened */
int sys_openat_root(int root_fd, const char *path, int flags, mode_t mode);
int sys_open_beneath(int dir_fd, const char *path, int flags);
int sys_close_from(int first);
int sys_capset(uint64_t effective, uint64_t permitted);
int sys_drop_bounding(uint64_t keep);
int sys_load_filter(const uint8_t *filter, uint32_t len);
int sys_write_file(int dir_fd, const char *path, const char *value);
/* RLIMIT_LOCKS, with the token. */
int sys_set_mark(const struct rlimit *mark);
/* Write n in decimal, NUL-terminated; returns where the NUL is. `at` has room for 21 bytes. */
char *text_number(char *at, unsigned long n);

/* zygote.c */
int zygote_main(int socket_fd, int userns_fd, int mntns_fd);
/* pid1.c */
_Noreturn void pid1_main(int control_fd);
enum source { FROM_CLIENT, FROM_SIGNALS, FROM_CGROUP };
int loop_watch(int fd, enum source source, uint32_t index, uint32_t events, int op);
void loop_retry(void); /* call table_settle_due(true) before long */
/* Send to a client, without blocking. False: not now; table_flush() or table_settle_due() comes. */
bool client_send(uint32_t index, uint32_t type, uint32_t id, const void *payload, uint32_t len);
/* table.c */
struct record *table_init(void); /* EXECS_MAX of them, shared with children; NULL and errno */
void table_set_cgroup(int fd);
void table_use_marks(int proc_fd); /* there are no cgroups */
int table_start(uint32_t client, struct inbox *in, struct child *child, struct failure *fail);
bool table_kill(uint32_t client, uint32_t id, const struct kill_req *req); /* false: no such id */
bool table_reap(void);                 /* true: there may be more */
bool table_idle(bool wait);            /* no process but PID 1 lives; `wait` until none does */
void table_note_event(uint32_t index); /* of its cgroup; acted upon by table_settle_due() */
void table_settle_due(bool all);
void table_flush(uint32_t client); /* it can take messages again */
void table_drop_client(uint32_t client);
/* mark.c */
int mark_next(uint32_t serial); /* of all that is forked from now on */
/* Signal (0: none) what has the mark, zombies included; returns how many, or -1 and errno. */
int mark_signal(int proc_fd, uint32_t serial, int signal_number, pid_t spared);
int mark_kill(int proc_fd, uint32_t serial, bool stop_all);
/* setup.c */
int setup_stage(const struct inbox *in, struct failure *fail);
int setup_lock(struct failure *fail);
int setup_user_limits(const struct inbox *in, struct failure *fail);
struct kernel_mounts {
    int fd[3]; /* O_PATH: /proc, /sys, /dev, wherever they are attached now */
};
int setup_open_mounts(struct kernel_mounts *mounts, struct failure *fail);
struct host_mounts {
    int count;
    int fd[HOST_MOUNTS_MAX]; /* O_PATH, like those of kernel_mounts */
    const char *target[HOST_MOUNTS_MAX];
    char targets[HOST_TARGETS_MAX];
};
/* Take over the mounts of an M_ROOT; `cursor` is behind its host name. */
int setup_keep_mounts(struct inbox *in, const uint8_t *cursor, struct host_mounts *out,
                      struct failure *fail);
int setup_swap_root(int overlay_fd, const struct kernel_mounts *mounts,
                    const struct host_mounts *host, struct failure *fail);
int setup_views(const struct inbox *in, const struct kernel_mounts *mounts, struct failure *fail);
/* command.c */
int command_parse(const struct inbox *in, struct command *out);
const char *command_env(const struct command *command, const char *name);
/* path.c: fds are O_PATH, -1 and errno if it fails */
/* Open the directory `path` (absolute, changed meanwhile); with `make`, make what is missing. */
int path_open_directory(int root_fd, char *path, bool make);
/* Follow path's symlinks down to a directory (returned) and the name in it that a rename can replace
 * (*base, in `buffer` of PATH_MAX bytes). */
int path_find_target(int root_fd, const char *path, char *buffer, const char **base, bool make);
/* user.c */
int user_find(int root_fd, const char *spec, struct user *out, struct failure *fail);
int user_become(const struct user *user, struct failure *fail);
/* exec.c, file_child.c: run in a child, never return */
_Noreturn void exec_child(struct child *self, struct inbox *in);
_Noreturn void file_child(struct child *self, struct inbox *in);

/* Record where a set-up failed; returns -1 so that it can end a function. errno is read. */
int fail_at(struct failure *fail, enum step step, uint32_t index);

#endif
