#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "flashgla/base/context.h"
#include "flashgla/base/current_device.h"
#include "flashgla/base/file.h"
#include "flashgla/base/graph.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/base/quantities.h"
#include "flashgla/base/shared_library.h"
#include "flashgla/base/tensor.h"
#include "flashgla/base/transfer.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif
#include "testing/compare.h"
#include "testing/devices.h"
#include "testing/random.h"
#include "testing/temporary_folder.h"

namespace flashgla {
namespace {

TEST(Float16, RoundTripsEveryFiniteValue) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    Float16 half;
    half.bits = static_cast<std::uint16_t>(bits);
    const float value = half;
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(Float16(value))));
    } else {
      EXPECT_EQ(Float16(value).bits, half.bits) << bits;
    }
  }
}

TEST(Float16, RoundsToNearestEven) {
  EXPECT_EQ(Float16(2049.0f).bits, Float16(2048.0f).bits);
  EXPECT_EQ(static_cast<float>(Float16(2051.0f)), 2052.0f);
  EXPECT_EQ(static_cast<float>(Float16(65520.0f)), std::numeric_limits<float>::infinity());
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f + 0x1p-8f)), 1.0f);
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f + 3 * 0x1p-8f)), 1.0f + 0x1p-6f);
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(TensorView, SlicesSelectsAndSplitsWithoutCopying) {
  Tensor packed = Tensor::zeros({2, 3, 8}, DType::f32);
  for (int i = 0; i < 48; ++i) packed.as<float>()[i] = static_cast<float>(i);
  const TensorView right = packed.view().slice(2, 4, 8).split_last(2);  // [2,3,2,2]
  EXPECT_EQ(right.shape, (Shape{2, 3, 2, 2}));
  EXPECT_FALSE(right.is_contiguous());
  const std::int64_t index[] = {1, 2, 1, 0};
  EXPECT_EQ(load_element(right, index), 46.0);
  EXPECT_EQ(right.select(1, 2).shape, (Shape{2, 2, 2}));
  EXPECT_EQ(packed.view().slice(2, 4, 8).as_rows().shape, (Shape{6, 4}));
  EXPECT_THROW(packed.view().slice(2, 4, 9), Error);
  EXPECT_THROW(right.reshape({24}), Error);
}

TEST(Tensor, AccessUnderTheWrongTypeIsAnError) {
  Tensor tensor = Tensor::zeros({2}, DType::bf16);
  EXPECT_THROW(tensor.as<float>(), Error);
}

TEST(Arena, PlanEqualsUse) {
  Arena arena;
  auto work = [&] {
    ArenaScope all(arena);
    arena.allocate(100, "a");
    {
      ArenaScope inner(arena);
      arena.allocate(1000, "b");
    }
    arena.allocate(10, "c");
  };
  arena.begin_planning();
  work();
  EXPECT_EQ(arena.plan().at("a"), 128u);
  EXPECT_EQ(arena.plan().at("b"), 1024u);
  EXPECT_EQ(arena.plan().count("c"), 0u);
  arena.commit_plan();
  work();
  EXPECT_EQ(arena.peak(), 128u + 1024u);
  EXPECT_THROW(arena.allocate(2000), Error);
}

TEST(Arena, GrowsWithoutMovingWhatIsLive) {
  Arena arena;
  auto* first = static_cast<char*>(arena.allocate(64));
  first[0] = 42;
  for (int round = 0; round < 3; ++round) {
    ArenaScope scope(arena);
    auto* big = static_cast<char*>(arena.allocate(3u << 20));
    big[0] = 1;
    big[(3u << 20) - 1] = 2;
  }
  EXPECT_EQ(first[0], 42);
  EXPECT_EQ(arena.used(), 64u);
}

TEST(Arena, BorrowsWhatADryRunPlanned) {
  Arena arena;
  for (const std::size_t bytes : {1000u, 3000u}) {
    arena.begin_planning();
    {
      ArenaScope scope(arena);
      arena.allocate(bytes);
    }
    const std::size_t planned = arena.peak();
    const Tensor memory = Tensor::empty({static_cast<std::int64_t>(planned)}, DType::u8);
    arena.borrow(memory->data, planned);
    EXPECT_FALSE(arena.planning());
    ArenaScope scope(arena);
    EXPECT_EQ(arena.allocate(bytes), memory->data);
    EXPECT_THROW(arena.allocate(1), Error);
    EXPECT_THROW(arena.borrow(memory->data, planned), Error);
  }
}

// A graph's copy is made at each launch, not while it is recorded, and reads what its source holds then.
TEST(Graph, DoesItsWorkAtEachLaunch) {
  for (const Device device : testing::test_devices()) {
    const Context context(device);
    const Queue& queue = context.queue();
    const Tensor from = Tensor::zeros({4}, DType::i32, device), to = Tensor::zeros({4}, DType::i32, device);
    const auto host = allocate_pinned_memory(from->bytes());
    auto* values = static_cast<std::int32_t*>(host.get());
    const Graph graph(queue, [&] { queue.copy(to->data, from->data, to->bytes()); });
    for (int launch = 1; launch < 4; ++launch) {
      for (int i = 0; i < 4; ++i) values[i] = launch * 10 + i;
      queue.copy(from->data, values, from->bytes());
      graph.launch();
      queue.copy(values, to->data, to->bytes());
      queue.synchronize();
      for (int i = 0; i < 4; ++i) EXPECT_EQ(values[i], launch * 10 + i) << name_of(device);
      queue.zero(from->data, from->bytes());
      queue.synchronize();
    }
    EXPECT_THROW(Graph(queue, [] { throw Error("not to be recorded"); }).launch(), Error);
    graph.launch();  // a recording that failed leaves the queue usable
    queue.copy(values, to->data, to->bytes());
    queue.synchronize();
    EXPECT_EQ(values[3], 0) << name_of(device);
  }
}

// More than its pieces hold, in an odd number of bytes.
TEST(Transfer, BringsEveryByteThereAndBack) {
  constexpr std::int64_t kBytes = (std::int64_t{70} << 20) + 3;
  const auto byte_at = [](std::size_t i) { return static_cast<std::uint8_t>(i * 2654435761u >> 13); };
  for (const Device device : testing::test_devices()) {
    const Tensor there = Tensor::empty({kBytes}, DType::u8, device);
    Transfer transfer(device);
    transfer.to_device(there->data, kBytes, [&](void* piece, std::size_t begin, std::size_t bytes) {
      for (std::size_t i = 0; i < bytes; ++i) static_cast<std::uint8_t*>(piece)[i] = byte_at(begin + i);
    });
    transfer.finish();
    std::size_t seen = 0, wrong = 0;
    transfer.to_host(there->data, kBytes, [&](const void* piece, std::size_t begin, std::size_t bytes) {
      EXPECT_EQ(begin, seen);
      for (std::size_t i = 0; i < bytes; ++i) wrong += static_cast<const std::uint8_t*>(piece)[i] != byte_at(begin + i);
      seen += bytes;
    });
    EXPECT_EQ(seen, static_cast<std::size_t>(kBytes));
    EXPECT_EQ(wrong, 0u) << name_of(device);
  }
}

// New memory of zeros does not overtake, behind work that is queued already, what a transfer brings there.
TEST(Transfer, ZerosComeBeforeWhatFollowsThem) {
  for (const Device device : testing::test_devices()) {
    const Context context(device);
    const Queue& queue = context.queue();
    queue.activate();
    const Tensor from = Tensor::zeros({std::int64_t{16} << 20}, DType::u8, device);
    const Tensor to = Tensor::zeros(from->shape, DType::u8, device);
    Transfer transfer(device);
    for (int copy = 0; copy < 64; ++copy) queue.copy(to->data, from->data, to->bytes());
    const Tensor there = Tensor::zeros({1000}, DType::u8, device);
    transfer.to_device(there->data, there->bytes(),
                       [](void* piece, std::size_t, std::size_t bytes) { std::memset(piece, 7, bytes); });
    transfer.finish();
    queue.synchronize();
    const Tensor back = testing::copied_to(there, Device::cpu());
    for (std::int64_t i = 0; i < back->numel(); ++i) ASSERT_EQ(back->as<std::uint8_t>()[i], 7) << name_of(device);
  }
}

#ifdef FLASHGLA_CUDA
TEST(CurrentDevice, IsTheCallersAgainAfterwards) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  cuda::make_current(Device::cuda(0));
  {
    const CurrentDevice current(Device::cuda(1));
    EXPECT_EQ(cuda::exchange_current(1), -1) << "it is not the device that is asked for";
    Tensor::zeros({8}, DType::f32, Device::cuda(1));
  }
  EXPECT_EQ(cuda::exchange_current(0), -1) << "it is not the one before";
}
#endif

TEST(ParallelFor, RunsEveryTaskOnceAndRethrows) {
  const Context context(Device::cpu(), 2);
  std::vector<int> seen(1000, 0);
  parallel_for(context, 1000, [&](std::int64_t i) { seen[i]++; });
  EXPECT_EQ(seen, std::vector<int>(1000, 1));
  EXPECT_THROW(parallel_for(context, 10,
                            [](std::int64_t i) {
                              if (i == 7) throw Error("seven");
                            }),
               Error);
}

TEST(Device, NamesRoundTrip) {
  EXPECT_EQ(device_from_name("cuda"), Device::cuda(0));
  EXPECT_EQ(name_of(device_from_name("cuda:3")), "cuda:3");
  EXPECT_THROW(device_from_name("gpu"), Error);
}

// More than is free is refused as on a full device, without taking what others need.
TEST(Device, WithoutRoomForATensorSaysSoInOneLineWithTheRemedy) {
  for (const Device device : testing::test_devices()) {
    const auto refused = [&]() -> std::string {
      try {
        allocate_memory(std::size_t{1} << 42, device);
      } catch (const Error& error) {
        return error.what();
      }
      return "no error";
    };
    const std::string message = refused();
    const bool cpu = device.kind == Device::Kind::cpu;
    EXPECT_THAT(message, ::testing::HasSubstr("not enough memory on " + name_of(device) + " for 4398046511104 bytes" +
                                              (cpu ? " beside the " : ": ")));
    EXPECT_THAT(message, ::testing::HasSubstr(cpu ? "; it has " + std::to_string(host_memory())
                                                  : "nvidia-smi shows who holds the rest"));
    EXPECT_EQ(message.find('\n'), std::string::npos);
    EXPECT_EQ(refused().substr(0, 20), message.substr(0, 20));  // the device is as before
    EXPECT_TRUE(allocate_memory(1 << 20, device));
  }
}

TEST(Compare, SeesWhatIsWrong) {
  const Tensor reference = testing::random_normal({100}, DType::f64, 1);
  Tensor x = testing::converted(reference, DType::f32);
  EXPECT_EQ(testing::check_close("x", x, reference, 1e-6), "");
  x.as<float>()[3] += 0.1f;
  EXPECT_NE(testing::check_close("x", x, reference, 1e-6), "");
  testing::poison(x);
  EXPECT_NE(testing::check_close("x", x, reference, 1e9), "");
}

TEST(AtomicFile, IsFoundWholeOrNotAtAll) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "flashgla_atomic_file";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string path = folder / "a.txt";
  write_file(path, "first");
  {
    AtomicFile file(path);
    file.write("second, abandoned");
  }
  EXPECT_EQ(read_file(path), "first");
  write_file(path, "");
  EXPECT_EQ(read_file(path), "");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()), 1);
  std::filesystem::remove_all(folder);
}

TEST(Quantities, AreReadAsPeopleWriteThem) {
  EXPECT_EQ(parse_bytes("24GiB"), std::size_t{24} << 30);
  EXPECT_EQ(parse_bytes("1.5 KB"), 1500u);
  EXPECT_EQ(parse_bytes("2g"), 2000000000u);
  EXPECT_EQ(parse_bytes("77"), 77u);
  EXPECT_EQ(parse_bytes("77B"), 77u);
  for (const char* bad : {"", "GB", "3 apples", "-1GB", "9999999TiB", "1GiBs", "1iB", "1BB", "1.2.3", "nan"}) {
    EXPECT_THROW(parse_bytes(bad), Error) << bad;
  }
  EXPECT_EQ(parse_count("15B"), 15000000000);
  EXPECT_EQ(parse_count("0.5M"), 500000);
  EXPECT_EQ(parse_count("1e3"), 1000);
  EXPECT_EQ(parse_count("-1"), -1);
  EXPECT_EQ(parse_count("9007199254740992"), std::int64_t{1} << 53);
  EXPECT_EQ(parse_count("9007199254740991"), (std::int64_t{1} << 53) - 1);
  EXPECT_THROW(parse_count("9007199254740993"), Error);
  EXPECT_THROW(parse_count("-9223372036854775808"), Error);
  EXPECT_EQ(parse_number("1e-320"), 1e-320);
  for (const char* bad : {"", "k", "1.5", "1e30", "99999999999999999999", "nan", "inf", "1Q", "1 k", "0x"}) {
    EXPECT_THROW(parse_count(bad), Error) << bad;
  }
}

TEST(Context, RefusesThreadsThatNoMachineHas) {
  EXPECT_THROW(Context(Device::cpu(), 5000), Error);
  EXPECT_THROW(Context(Device::cpu(), -1), Error);
}

// What stands at the name that is not a plain file must still be there when the file has been written.
TEST(AtomicFile, WhatAKilledProcessLeftIsRemovedAndNothingElse) {
  const testing::TemporaryFolder folder;
  for (const char* name : {"kept.json", "kept.json.partial-1", "other.partial-1", "kept.json.partial-2.txt",
                           "kept.json.partial-", "kept.json.partial", "notes.partial", "17"}) {
    write_file(folder / name, name);
  }
  std::filesystem::create_directory(folder / "kept.json.partial-3");
  remove_partial_files(folder.path(), {"kept.json"});
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator()),
            8);
  EXPECT_FALSE(std::filesystem::exists(folder / "kept.json.partial-1"));
}

TEST(AtomicFile, TakesNoPlaceOfALinkOrAPipe) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "flashgla_atomic_links";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder / "kept");
  std::filesystem::create_symlink(folder / "kept/a.txt", folder / "link");
  write_file(folder / "kept/a.txt", "before");
  write_file(folder / "link", "after");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "kept/a.txt"), "after");
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  write_file(pipe, "through");
  char text[16] = {};
  EXPECT_EQ(::read(reader, text, sizeof text), 7);
  ::close(reader);
  EXPECT_STREQ(text, "through");
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  std::filesystem::remove_all(folder);
}

TEST(AtomicFile, WhatCannotBeWrittenIsToldBefore) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "flashgla_writable";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  EXPECT_THROW(require_writable(folder), Error);
  EXPECT_THROW(require_writable(folder / "none/a.txt"), Error);
  require_writable(folder / "a.txt");
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

TEST(AtomicFile, ErrorsNameTheFile) {
  for (const char* path : {"/nonexistent/folder/file", "/proc"}) {
    try {
      read_file(path);
      FAIL() << path;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(write_file("/nonexistent/folder/file", "x"), Error);
}

TEST(SharedLibrary, GivesFunctionsAndNamesWhatIsNotThere) {
  const SharedLibrary library("libm.so.6");
  double (*cosine)(double) = nullptr;
  library.find(cosine, "cos");
  EXPECT_EQ(cosine(0.0), 1.0);
  const auto error = [](const auto& run) {
    try {
      run();
    } catch (const Error& thrown) {
      return std::string(thrown.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(error([&] { library.find(cosine, "no_such_function"); }), "libm.so.6 has no no_such_function");
  EXPECT_THAT(error([] { SharedLibrary("libno_such_library.so.1"); }), ::testing::HasSubstr("libno_such_library.so.1"));
}

}  // namespace
}  // namespace flashgla
