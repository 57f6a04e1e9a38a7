/*
 * rival.c - what a policy could do to the command that judges it, and the judge that looks.
 *
 *   rival respawn   a process that is never the same: it forks and its parent ends
 *   rival daemon    forked twice, in a session of its own
 *   rival storm     forks and ends without pause, up to STORM_MAX at once
 *   rival flood     forks until it is refused, and all of them stay
 *   rival tracer    tries to trace every process there is
 *   rival watcher   counts what happens in /judge, by inotify
 *   rival stopped   stops itself, with a child that goes on
 *   rival waiting   a parent that the kernel keeps in vfork(2), uninterruptible
 *   rival judge     prints how many other processes there are, how many of the rivals counted on
 *                   while it looked, and who traces it
 *   rival moving    waits until all that count of themselves have, from now on
 *
 * Each counts in a page of /tmp/beats that all share: that is how one sees from outside that it runs.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const NAMES[] = {"respawn", "daemon",  "storm",  "tracer",
                                    "watcher", "stopped", "waiting"};
#define COUNT     (sizeof NAMES / sizeof *NAMES)
#define STORM     2
#define WATCHER   4 /* the one that counts what others do */
#define STORM_MAX 24
static volatile unsigned long *beats; /* and at COUNT how many the storm is */

static void nap(void) {
    usleep(1000);
}

static int each_process(void (*visit)(pid_t)) {
    int count = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc && (entry = readdir(proc));) {
        pid_t pid = atoi(entry->d_name);
        if (!isdigit(*entry->d_name) || pid == 1 || pid == getpid())
            continue;
        count++;
        if (visit)
            visit(pid);
    }
    if (proc)
        closedir(proc);
    return count;
}

static void seize(pid_t pid) {
    ptrace(PTRACE_SEIZE, pid, 0, 0);
}

static int tracer_of_self(void) {
    char line[256];
    int tracer = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        sscanf(line, "TracerPid: %d", &tracer);
    return tracer;
}

static int judge(void) {
    unsigned long before[COUNT];
    int moved = 0, others = 0, tracer = 0;
    for (size_t i = 0; i < COUNT; i++)
        before[i] = beats[i];
    for (int i = 0; i < 60; i++) {
        int now = each_process(NULL);
        others = now > others ? now : others;
        tracer = tracer ? tracer : tracer_of_self();
        nap();
    }
    for (size_t i = 0; i < COUNT; i++)
        moved += beats[i] != before[i];
    printf("%d %d %d\n", others, moved, tracer);
    return 0;
}

static int moving(void) {
    unsigned long before[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        before[i] = beats[i];
    for (size_t i = 0; i < COUNT; i++)
        while (i != WATCHER && beats[i] == before[i])
            nap();
    return 0;
}

/* Never the same processes, and never more than the test's limit has room for beside the others. */
static void storm(void) {
    if (__atomic_add_fetch(&beats[COUNT], 1, __ATOMIC_SEQ_CST) < STORM_MAX) {
        if (fork() >= 0)
            return;
    }
    __atomic_sub_fetch(&beats[COUNT], 1, __ATOMIC_SEQ_CST);
    if (beats[STORM] % 2) { /* now and then one ends, but never the last */
        if (__atomic_fetch_sub(&beats[COUNT], 1, __ATOMIC_SEQ_CST) > 1)
            _exit(0);
        __atomic_add_fetch(&beats[COUNT], 1, __ATOMIC_SEQ_CST);
    }
}

static int flood(void) {
    for (int i = 0; i < 3; i++)
        close(i);
    while (fork() >= 0)
        ;
    for (;;)
        pause();
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    /* Not with O_CREAT at once: in /tmp that is refused to root where another has made it
     * (fs.protected_regular, proc_sys_fs(5)). */
    int fd = open("/tmp/beats", O_RDWR);
    if (fd < 0)
        fd = open("/tmp/beats", O_RDWR | O_CREAT, 0666);
    fchmod(fd, 0666);
    if (fd < 0 || ftruncate(fd, 4096))
        return 1;
    beats = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!strcmp(mode, "judge"))
        return judge();
    if (!strcmp(mode, "moving"))
        return moving();
    if (!strcmp(mode, "flood"))
        return flood();
    size_t which = 0;
    while (which < COUNT && strcmp(NAMES[which], mode))
        which++;
    if (which == COUNT)
        return 2;
    volatile unsigned long *beat = &beats[which];
    signal(SIGCHLD, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    for (int i = 0; i < 2; i++) { /* nobody's child, in a session of its own */
        if (fork())
            _exit(0);
        setsid();
    }
    for (int i = 0; i < 3; i++)
        close(i);
    if (!strcmp(mode, "stopped") && !fork())
        raise(SIGSTOP);
    if (!strcmp(mode, "waiting") && fork()) {
        if (vfork() == 0)
            for (;;)
                pause();
    }
    int notify = -1;
    if (!strcmp(mode, "watcher")) {
        notify = inotify_init1(IN_NONBLOCK);
        if (inotify_add_watch(notify, "/judge", IN_ALL_EVENTS) < 0)
            _exit(3);
        ++*beat;
    }
    for (;; usleep(strcmp(mode, "storm") ? 5000 : 40000)) {
        if (notify >= 0) {
            char events[4096];
            if (read(notify, events, sizeof events) > 0)
                ++*beat;
            continue;
        }
        ++*beat;
        if (!strcmp(mode, "respawn") && fork() > 0)
            _exit(0);
        if (!strcmp(mode, "storm"))
            storm();
        if (!strcmp(mode, "tracer") && fork() == 0) {
            each_process(seize);
            usleep(4000);
            _exit(0); /* and lets go of all, or the other rivals would stand still at a signal */
        }
    }
}
