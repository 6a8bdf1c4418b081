// For two files of Horovod 0.28.1.
#include <dlfcn.h>
#include <mpi.h>
#include <stdlib.h>
#include <unistd.h>
#include <stdexcept>
#include <string>
#include <vector>

// Ranks would end by a signal where another one is lost.
// mpi_controller.cc: rank 0 does not look at what these return, and reads what it has not received. Thrown, it becomes
// the error that all other ranks raise.
inline int checked(int code) {
  if (code != MPI_SUCCESS) throw std::runtime_error("a collective of MPI failed");
  return code;
}
#define MPI_Gather(...) checked(MPI_Gather(__VA_ARGS__))
#define MPI_Gatherv(...) checked(MPI_Gatherv(__VA_ARGS__))
#define MPI_Bcast(...) checked(MPI_Bcast(__VA_ARGS__))

// mpi_context.cc: Horovod's thread frees its communicators while another thread tells all communicators of the loss,
// without a lock (Open MPI 5.0.11). So they are freed when Horovod starts again.
inline std::vector<MPI_Comm>& unused() {
  static std::vector<MPI_Comm> communicators;
  return communicators;
}
inline int free_later(MPI_Comm* communicator) {
  unused().push_back(*communicator);
  *communicator = MPI_COMM_NULL;
  return MPI_SUCCESS;
}
inline void free_unused() {
  for (auto& communicator : unused()) MPI_Comm_free(&communicator);
  unused().clear();
}

// mpi_context.cc: the wheel of Open MPI was built for another folder, and finds its own by OPAL_PREFIX, which its mpirun
// sets. Without mpirun it is set here, and only for this call: a child process may start another MPI.
inline int init_in_place(int* argc, char*** argv, int required, int* provided) {
  Dl_info library;
  std::string prefix;
  if (getenv("OPAL_PREFIX") == nullptr && dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &library) != 0) {
    if (char* path = realpath(library.dli_fname, nullptr)) {
      prefix = path;
      free(path);
      for (int level = 0; level < 2 && !prefix.empty(); ++level) prefix.resize(prefix.find_last_of('/'));
    }
  }
  bool is_wheel = false;
  for (const char* wrapper : {"/bin/orterun_wrapper", "/bin/ompirun_wrapper"})
    is_wheel = is_wheel || (!prefix.empty() && access((prefix + wrapper).c_str(), X_OK) == 0);
  if (is_wheel) setenv("OPAL_PREFIX", prefix.c_str(), 1);
  int code = MPI_Init_thread(argc, argv, required, provided);
  if (is_wheel)
    for (const char* name : {"OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "PMIX_PREFIX"}) unsetenv(name);
  return code;
}
#define MPI_Init_thread(...) init_in_place(__VA_ARGS__)
#define MPI_Comm_free(communicator) free_later(communicator)
#define MPI_Comm_split_type(...) (free_unused(), MPI_Comm_split_type(__VA_ARGS__))
