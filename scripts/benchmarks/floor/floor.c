#define _GNU_SOURCE
#include "floor.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <linux/sched.h>

#define GROUP "floor"

/* Written where the hierarchy has the file, whichever version it is. */
static const struct {
    const char *file;
    const char *value;
} LIMITS[] = {
    {"memory.limit_in_bytes", "4294967296"}, {"memory.max", "4294967296"}, {"pids.max", "512"},
    {"cpu.cfs_quota_us", "100000"},          {"cpu.max", "100000 100000"},
};
enum { LIMIT_COUNT = sizeof LIMITS / sizeof LIMITS[0] };

static const char *const DEVICES[] = {"null", "zero", "full", "random", "urandom", "tty"};

void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    _exit(1);
}

double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

long next_count(void) {
    char line[32];
    if (!fgets(line, sizeof line, stdin))
        return 0;
    return strtol(line, NULL, 10);
}

void print_sample(double ms) {
    printf("%.4f\n", ms);
}

void end_samples(void) {
    puts(".");
    fflush(stdout);
}

static int open_parent(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        die(path);
    return fd;
}

void parse_job(struct job *job, char **args) {
    int count = 0;
    while (args[count])
        count++;
    if (count < 5 || count - 4 > MAX_HIERARCHIES) {
        fputs("arguments: LOWER STAGE ID_BASE PROGRAM V2_PARENT|- V1_PARENT...\n", stderr);
        _exit(2);
    }
    job->lower = args[0];
    job->stage = args[1];
    job->id_base = strtol(args[2], NULL, 10);
    job->program = args[3];
    job->hierarchies = count - 4;
    for (int i = 0; i < job->hierarchies; i++) {
        const char *path = args[4 + i];
        job->parents[i] = i == 0 && strcmp(path, "-") == 0 ? -1 : open_parent(path);
    }
}

static void write_at(int directory, const char *file, const char *value) {
    int fd = openat(directory, file, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        die(file);
    size_t size = strlen(value);
    if (write(fd, value, size) != (ssize_t)size)
        die(file);
    close(fd);
}

int make_groups(const struct job *job) {
    int v2_group = -1;
    for (int i = 0; i < job->hierarchies; i++) {
        if (job->parents[i] < 0)
            continue;
        if (mkdirat(job->parents[i], GROUP, 0755))
            die("mkdir in a cgroup");
        int group = openat(job->parents[i], GROUP, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (group < 0)
            die("open a cgroup");
        for (int k = 0; k < LIMIT_COUNT; k++) {
            if (faccessat(group, LIMITS[k].file, F_OK, 0) == 0)
                write_at(group, LIMITS[k].file, LIMITS[k].value);
        }
        if (i == 0)
            v2_group = group;
        else
            close(group);
    }
    return v2_group;
}

void remove_groups(const struct job *job) {
    for (int i = 0; i < job->hierarchies; i++) {
        /* EBUSY: a member is reaped but not yet gone from the hierarchy. */
        while (job->parents[i] >= 0 && unlinkat(job->parents[i], GROUP, AT_REMOVEDIR)) {
            if (errno != EBUSY)
                die("rmdir of a cgroup");
            sched_yield();
        }
    }
}

/* By `tasks`, of itself: of a thread that moves itself the kernel asks no RCU grace period, as it does
 * for `cgroup.procs` and for another's pid (7 to 17 ms). */
static void open_v1_groups(const struct job *job, int *entries) {
    for (int i = 1; i < job->hierarchies; i++) {
        entries[i] = openat(job->parents[i], GROUP "/tasks", O_WRONLY | O_CLOEXEC);
        if (entries[i] < 0)
            die("open tasks");
    }
}

static void join_v1_groups(const struct job *job, const int *entries) {
    for (int i = 1; i < job->hierarchies; i++) {
        if (write(entries[i], "0", 1) != 1)
            die("write to tasks");
    }
}

static void close_v1_groups(const struct job *job, const int *entries) {
    for (int i = 1; i < job->hierarchies; i++)
        close(entries[i]);
}

static void map_ids(const struct job *job, pid_t pid) {
    char map[64], file[64];
    snprintf(map, sizeof map, "0 %ld 65536", job->id_base);
    snprintf(file, sizeof file, "/proc/%d/uid_map", pid);
    write_at(AT_FDCWD, file, map);
    snprintf(file, sizeof file, "/proc/%d/gid_map", pid);
    write_at(AT_FDCWD, file, map);
}

pid_t clone_sandbox(const struct job *job, int v2_group) {
    int placed[2];
    if (pipe2(placed, O_CLOEXEC))
        die("pipe2");
    struct clone_args args = {
        .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
                 CLONE_NEWUTS | (v2_group >= 0 ? CLONE_INTO_CGROUP : 0),
        .exit_signal = SIGCHLD,
        .cgroup = v2_group >= 0 ? (__u64)v2_group : 0,
    };
    int entries[MAX_HIERARCHIES];
    open_v1_groups(job, entries);
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    if (pid < 0)
        die("clone3");
    char byte;
    if (pid == 0) {
        close(placed[1]);
        if (read(placed[0], &byte, 1) != 1)
            _exit(1);
        close(placed[0]);
        join_v1_groups(job, entries);
        close_v1_groups(job, entries);
        /* After placement, or the namespace's root would be the group the bench itself is in. */
        if (unshare(CLONE_NEWCGROUP))
            die("unshare(CLONE_NEWCGROUP)");
        if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0))
            die("become root inside");
        return 0;
    }
    close(placed[0]);
    close_v1_groups(job, entries);
    map_ids(job, pid);
    if (write(placed[1], "x", 1) != 1)
        die("let the child go");
    close(placed[1]);
    return pid;
}

static void mount_or_die(const char *source, const char *target, const char *type,
                         unsigned long flags, const char *options) {
    if (mount(source, target, type, flags, options))
        die(target);
}

static void make_directory(const char *path) {
    if (mkdir(path, 0755))
        die(path);
}

static void fill_dev(void) {
    mount_or_die("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k");
    for (size_t i = 0; i < sizeof DEVICES / sizeof DEVICES[0]; i++) {
        char source[32], target[32];
        snprintf(source, sizeof source, "/dev/%s", DEVICES[i]);
        snprintf(target, sizeof target, "dev/%s", DEVICES[i]);
        int fd = open(target, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0)
            die(target);
        close(fd);
        mount_or_die(source, target, NULL, MS_BIND, NULL);
    }
    make_directory("dev/pts");
    mount_or_die("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
                 "newinstance,ptmxmode=0666,mode=0620");
    make_directory("dev/shm");
    mount_or_die("tmpfs", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m");
}

void enter_root(const struct job *job) {
    char options[3 * PATH_MAX];
    mount_or_die(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL);
    mount_or_die("tmpfs", job->stage, "tmpfs", 0, "mode=755,size=2g,nr_inodes=262144");
    if (chdir(job->stage))
        die(job->stage);
    make_directory("upper");
    make_directory("work");
    make_directory("root");
    snprintf(options, sizeof options, "userxattr,lowerdir=%s,upperdir=upper,workdir=work",
             job->lower);
    mount_or_die("overlay", "root", "overlay", 0, options);
    if (chdir("root"))
        die("root");
    mount_or_die("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount_or_die("sysfs", "sys", "sysfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    fill_dev();
    if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
        die("pivot_root");
}
