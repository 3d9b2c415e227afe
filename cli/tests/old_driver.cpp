// Stands for libcuda.so.1, of a driver that is too old for this program.
extern "C" int cuInit(unsigned) { return 0; }
extern "C" int cuDriverGetVersion(int* version) {
  *version = 11040;
  return 0;
}
