/*
 * files.h - what the C files of the file operations share; each runs in a child of PID 1 of its own.
 *
 * file_child.c starts one: file.c reads, writes, stats; tree.c lists, changes and removes trees; tar.c
 * and untar.c put trees into archives and take them out. Below them walk.c goes through a tree, glob.c
 * compares names, fresh.c puts a file into its place, emit.c says what came of it.
 */
#ifndef SANDBOXD_FILES_H
#define SANDBOXD_FILES_H

#include "init.h"

#include <sys/stat.h>

/* The one operation of this process. */
struct job {
    const struct child *child;
    struct failure *fail;
    struct record *record;
    struct file_req req;
    const char *path;
    const char *other;
    const char *patterns[PATTERNS_MAX]; /* include_count, then exclude_count */
    int data_fd;                        /* -1: none */
    int report_fd;
    uid_t owner; /* of `other`; -1: not to be changed */
    gid_t group;
};
extern struct job job;

/* emit.c */
int job_fail(enum step step, uint32_t index); /* -1; errno is read */
/* The same, and tells the path below that of the request at which it happened. */
int job_fail_in(enum step step, uint32_t index, const char *path);
int read_some(int fd, void *at, size_t size);         /* read(2), EINTR aside */
int write_all(int fd, const void *from, size_t size); /* 0 or -1 and errno */
int emit(const void *from, size_t size);              /* to the data pipe, buffered */
int emit_flush(void);
int emit_file(int fd, const char *path, uint64_t size); /* exactly so much of it */
/* Past the buffer, which is empty: from `at` up to `left` bytes; how many there were, or -1. */
int64_t emit_part(int fd, off_t at, uint64_t left);
int emit_entry(const struct stat *st, int err, const char *path, const char *target);

/* fresh.c */
/* A file on its way: without a name as long as it is incomplete, where the file system has such. */
struct fresh {
    int fd;
    bool named;
    char name[40];
};
int fresh_open(int parent, struct fresh *fresh);
int fresh_place(int parent, struct fresh *fresh,
                const char *base); /* replaces what is no directory */
int fresh_place_new(int parent, struct fresh *fresh, const char *base); /* EEXIST: replaces none */
void fresh_drop(int parent, struct fresh *fresh);
/* By way of PID 1's own /proc: what an O_PATH fd cannot do itself. */
int fd_chmod(int fd, mode_t mode);
/* Open the directory that `path` is in (absolute; last symlink not followed); *base in `buffer`. */
int open_above(const char *path, char buffer[PATH_MAX], const char **base, bool make);

/* file.c */
int file_read(void);
int file_write(void);
int file_stat(void);

/* walk.c */
struct visited {
    int dir_fd; /* of the directory that it is in */
    int err;    /* why that directory could not be read, or EXDEV: another file system is there */
    const char *name;
    const char *path; /* below the root of the walk */
    struct stat st;
};
enum { WALK_ON = 0, WALK_PRUNE = 1, WALK_STOP = -1 };
/* Visit all that is below a directory, `depth` levels at most, each directory before its content; not
 * beyond its file system. 0, or WALK_STOP and the failure is in job.fail. */
int walk(int root_fd, uint32_t depth, int (*visit)(const struct visited *));
int open_inside(int dir_fd, const char *name); /* a directory of the same mount, no symlink */

/* tree.c */
int tree_list(void);
int tree_make(void);
int tree_remove(void);
int tree_move(void);
int tree_change(void); /* FILE_CHMOD, FILE_CHOWN */

/* glob.c: `*` and `?` keep to one name, `**` goes over any number of them */
bool glob_match(const char *pattern, const char *text);
/* A pattern without a slash is compared with the last name of a path. */
bool filter_includes(const char *path);
bool filter_excludes(const char *path);
bool filter_wants(const char *path); /* it or a directory above is included, and none excluded */

/* tar.c */
#define TAR_BLOCK 512
struct tar_header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100];
    char magic[6], version[2], uname[32], gname[32], major[8], minor[8], prefix[155], pad[12];
};
uint32_t tar_checksum(const struct tar_header *header, bool as_signed);
int tar_pack(void);
/* untar.c */
int tar_unpack(void);

#endif
