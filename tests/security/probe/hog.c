/*
 * hog - takes all it can get of one resource.
 *
 *   hog MODE [LIMIT]         prints "N ERRNO" (taken, and why there was no more) and ends
 *   hog hold MODE [LIMIT]    the same, and keeps what it has until it is killed
 *
 * For tests/security. LIMIT bounds what is taken where the kernel might not.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static long limit;
static int null_fd;

/* Each takes one more and returns how many that were, or -1 and errno. */

static long take_inflight(void) {
    static int pair[2] = {-1, -1}, sent;
    int fds[250];
    union {
        char bytes[CMSG_SPACE(sizeof fds)];
        struct cmsghdr align;
    } control;
    if (sent++ % 8 == 0 && socketpair(AF_UNIX, SOCK_DGRAM, 0, pair))
        return -1;
    for (int i = 0; i < 250; i++)
        fds[i] = null_fd;
    struct iovec part = {"x", 1};
    struct msghdr msg = {.msg_iov = &part,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof control.bytes};
    struct cmsghdr *head = CMSG_FIRSTHDR(&msg);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(head), fds, sizeof fds);
    return sendmsg(pair[0], &msg, MSG_DONTWAIT) < 0 ? -1 : 250;
}

static long take_pipes(void) {
    int pair[2];
    if (pipe(pair))
        return -1;
    int size = fcntl(pair[1], F_GETPIPE_SZ);
    return size < 0 ? -1 : size / 4096;
}

static long take_stdout_pipe(void) {
    static int done;
    errno = EALREADY;
    if (done++)
        return -1;
    int size = fcntl(1, F_SETPIPE_SZ, 1 << 20);
    return size < 0 ? -1 : size / 4096;
}

static long take_inotify(void) {
    return inotify_init() < 0 ? -1 : 1;
}

static long take_watches(void) {
    static int instance = -1, made;
    char path[64];
    if (instance < 0 && (instance = inotify_init()) < 0)
        return -1;
    snprintf(path, sizeof path, "/dev/shm/w%d", made++);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    if (fd < 0)
        return -1;
    close(fd);
    return inotify_add_watch(instance, path, IN_MODIFY) < 0 ? -1 : 1;
}

/* Of one file, 32 KiB each; and of as many files as there are, each with one that an LSM may own. */
static long take_attributes(const char *space) {
    static char value[32768];
    static int made;
    char path[64], name[64];
    snprintf(path, sizeof path, "/dev/shm/attributes%d", *space ? 0 : made);
    snprintf(name, sizeof name, *space ? "%s.%d" : "security.selinux", space, made++);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    if (fd < 0)
        return -1;
    long result = syscall(SYS_fsetxattr, fd, name, value, sizeof value, 0L);
    int error = errno;
    close(fd);
    errno = error;
    return result < 0 ? -1 : 32;
}

static long take_user_attributes(void) {
    return take_attributes("user");
}

static long take_security_attributes(void) {
    return take_attributes("security");
}

static long take_labels(void) {
    return take_attributes("");
}

static long take_queues(void) {
    static int made;
    char name[32], message[8192] = "x";
    struct mq_attr attr = {.mq_maxmsg = 10, .mq_msgsize = sizeof message};
    snprintf(name, sizeof name, "/q%d", made++);
    mqd_t queue = mq_open(name, O_CREAT | O_RDWR, 0600, &attr);
    if (queue < 0)
        return -1;
    for (int i = 0; i < 10; i++)
        mq_send(queue, message, sizeof message, 0);
    return 1;
}

static long take_signals(void) {
    sigset_t set;
    union sigval value = {0};
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN);
    sigprocmask(SIG_BLOCK, &set, NULL);
    return sigqueue(getpid(), SIGRTMIN, value) ? -1 : 1;
}

static long take_timers(void) {
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_NONE};
    return timer_create(CLOCK_MONOTONIC, &event, &timer) ? -1 : 1;
}

static long take_locked(void) {
    char *page = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return page == MAP_FAILED || mlock(page, 65536) ? -1 : 16;
}

static long take_ptys(void) {
    return open("/dev/ptmx", O_RDWR | O_NOCTTY) < 0 ? -1 : 1;
}

static long take_epoll(void) {
    static int base = -1, instance = -1;
    struct epoll_event event = {.events = EPOLLIN};
    if (base < 0)
        base = eventfd(0, 0);
    instance = epoll_create1(0);
    if (base < 0 || instance < 0)
        return -1;
    return epoll_ctl(instance, EPOLL_CTL_ADD, base, &event) ? -1 : 1;
}

static long take_files(void) {
    return open("/dev/null", O_RDONLY) < 0 ? -1 : 1;
}

static long take_shm(void) {
    int id = shmget(IPC_PRIVATE, 1 << 20, IPC_CREAT | 0600);
    char *at = id < 0 ? (char *)-1 : shmat(id, NULL, 0);
    if (at == (char *)-1)
        return -1;
    memset(at, 1, 1 << 20);
    shmdt(at);
    return 1;
}

static long take_semaphores(void) {
    return semget(IPC_PRIVATE, 250, IPC_CREAT | 0600) < 0 ? -1 : 250;
}

static long take_messages(void) {
    static struct {
        long type;
        char text[8000];
    } message = {1, "x"};
    int id = msgget(IPC_PRIVATE, IPC_CREAT | 0600);
    if (id < 0)
        return -1;
    msgsnd(id, &message, sizeof message.text, IPC_NOWAIT);
    return 1;
}

/* Packets of 60,000 bytes in the receive buffers of sockets on the loopback, one a socket. */
static long take_udp(void) {
    static int sender = -1;
    static char packet[60000];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    if (sender < 0 && (sender = socket(AF_INET, SOCK_DGRAM, 0)) < 0)
        return -1;
    int receiver = socket(AF_INET, SOCK_DGRAM, 0);
    if (receiver < 0 || bind(receiver, (struct sockaddr *)&at, sizeof at) ||
        getsockname(receiver, (struct sockaddr *)&at, &len))
        return -1;
    sendto(sender, packet, sizeof packet, 0, (struct sockaddr *)&at, sizeof at);
    /* that one was dropped is told to nobody: look whether it is there */
    if (recv(receiver, packet, 1, MSG_PEEK | MSG_DONTWAIT) > 0)
        return 1;
    errno = ENOBUFS;
    return -1;
}

static long take_memory(void) {
    char *at = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return -1;
    memset(at, 1, 1 << 20);
    return 1;
}

static long take_processes(void) {
    pid_t pid = fork();
    if (pid == 0)
        for (;;)
            pause();
    return pid < 0 ? -1 : 1;
}

static void *sleeper(void *unused) {
    for (;;)
        pause();
    return unused;
}

static long take_threads(void) {
    pthread_t thread;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 65536);
    errno = pthread_create(&thread, &attr, sleeper, NULL);
    return errno ? -1 : 1;
}

/* Asks a proc view again and again; of the first one /tmp/asked has a byte for each answer. */
static void *reader(void *first) {
    int asked = first ? open("/tmp/asked", O_CREAT | O_WRONLY, 0600) : -1;
    for (;;) {
        int fd = open("/proc/meminfo", O_RDONLY);
        if (fd >= 0)
            close(fd);
        if (asked >= 0 && write(asked, "", 1) != 1)
            return NULL;
    }
}

static long take_readers(void) {
    static int made;
    pthread_t thread;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 65536);
    errno = pthread_create(&thread, &attr, reader, made++ ? NULL : &made);
    return errno ? -1 : 1;
}

/* A grandchild whose parent has ended: PID 1's to reap. */
static long take_orphans(void) {
    pid_t pid = fork();
    if (pid == 0) {
        if (fork() == 0)
            usleep(1000);
        _exit(0);
    }
    if (pid < 0 && errno == EAGAIN) {
        usleep(2000);
        return 0;
    }
    return pid < 0 || waitpid(pid, NULL, 0) != pid ? -1 : 1;
}

static long take_inodes(void) {
    static int made;
    char path[64];
    snprintf(path, sizeof path, "/tmp/i%d", made++);
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    return fd < 0 ? -1 : close(fd) ? -1 : 1;
}

static long write_into(const char *path) {
    static int fd = -1;
    static char block[1 << 20];
    if (fd < 0 && (fd = open(path, O_CREAT | O_WRONLY, 0600)) < 0)
        return -1;
    for (size_t done = 0; done < sizeof block;) {
        ssize_t put = write(fd, block + done, sizeof block - done);
        if (put < 0)
            return -1;
        done += (size_t)put;
    }
    return 1;
}

static long take_disk(void) {
    return write_into("/tmp/full");
}

static long take_dev_shm(void) {
    return write_into("/dev/shm/full");
}

static long take_lock(void) {
    static int fd = -1;
    if (fd >= 0) {
        errno = EALREADY;
        return -1;
    }
    fd = open("/etc/passwd", O_RDONLY);
    return fd < 0 || flock(fd, LOCK_EX | LOCK_NB) ? -1 : 1;
}

/* Whoever opens the file next waits for the holder (fcntl(2), F_SETLEASE). */
static long take_lease(void) {
    static int fd = -1;
    if (fd >= 0) {
        errno = EALREADY;
        return -1;
    }
    fd = open("/etc/passwd", O_RDONLY);
    signal(SIGIO, SIG_IGN);
    return fd < 0 || fcntl(fd, F_SETLEASE, F_WRLCK) ? -1 : 1;
}

static long take_dev(void) {
    static int made;
    char path[64];
    snprintf(path, sizeof path, "/dev/d%d", made++);
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    return fd < 0 ? -1 : close(fd) ? -1 : 1;
}

static long take_depth(void) {
    return mkdir("d", 0700) || chdir("d") ? -1 : 1;
}

#define MODE(name)                                                                                 \
    { #name, take_##name }

static const struct {
    const char *name;
    long (*take)(void);
} MODES[] = {
    MODE(inflight),
    MODE(pipes),
    MODE(stdout_pipe),
    MODE(inotify),
    MODE(watches),
    MODE(queues),
    MODE(signals),
    MODE(timers),
    MODE(locked),
    MODE(ptys),
    MODE(epoll),
    MODE(files),
    MODE(shm),
    MODE(semaphores),
    MODE(messages),
    MODE(udp),
    MODE(memory),
    MODE(processes),
    MODE(threads),
    MODE(orphans),
    MODE(inodes),
    MODE(disk),
    MODE(dev_shm),
    MODE(dev),
    MODE(depth),
    MODE(lock),
    MODE(lease),
    MODE(user_attributes),
    MODE(security_attributes),
    MODE(labels),
    MODE(readers),
};

int main(int argc, char **argv) {
    int hold = argc > 1 && !strcmp(argv[1], "hold");
    argv += 1 + hold;
    argc -= 1 + hold;
    if (argc < 1)
        return 2;
    limit = argc > 1 ? strtol(argv[1], NULL, 10) : 1000000;
    null_fd = open("/dev/null", O_RDONLY);
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < sizeof MODES / sizeof *MODES; i++) {
        if (strcmp(MODES[i].name, argv[0]))
            continue;
        long taken = 0, more = 0;
        errno = 0;
        while (taken < limit && (more = MODES[i].take()) >= 0)
            taken += more;
        char line[96];
        int len = snprintf(line, sizeof line, "%ld %s\n", taken,
                           more < 0 ? strerrorname_np(errno) : "enough");
        if (write(1, line, (size_t)len) != len)
            return 3;
        while (hold)
            pause();
        if (!strcmp(argv[0], "processes"))
            kill(0, SIGKILL);
        return 0;
    }
    return 2;
}
