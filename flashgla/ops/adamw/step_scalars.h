// Scalars of one update, which lie in the device's memory so that neither the host nor a captured graph takes part in
// what they become: an f64 tensor [kStepScalars] holds one StepScalars.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define FLASHGLA_HOST_DEVICE __host__ __device__
#else
#define FLASHGLA_HOST_DEVICE
#endif

namespace flashgla::ops::adamw {

struct StepScalars {
  // Written by the host before an update, in one copy.
  double learning_rate = 0.0;
  double gradient_scale = 1.0;  // such as one over the batch's tokens

  // Kept by `prepare`: updates made so far, the one it prepares counted in.
  double updates = 0.0;

  // Results of `prepare`.
  double gradient_norm = 0.0;    // of the gradient times gradient_scale, before clipping; NaN when no update is made
  double made = 0.0;             // 1: `step` makes the update; 0: it changes nothing
  double gradient_factor = 0.0;  // gradient_scale and clipping
  double rate = 0.0;             // learning_rate sqrt(c2) / c1, c_i = 1 - beta_i^updates
  double floor = 0.0;            // epsilon sqrt(c2)
};
constexpr std::int64_t kStepScalars = sizeof(StepScalars) / sizeof(double);
// Of which the host writes so many before an update.
constexpr std::int64_t kHostScalars = 2;

struct Settings {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
  double clip_norm = 0.0;  // gradients are scaled down to this norm; 0: no clipping
  std::uint64_t seed = 0;  // of stochastic rounding
};

// What `prepare` does on any device. `loss`: any value that is finite exactly when the losses are.
FLASHGLA_HOST_DEVICE inline StepScalars prepared(StepScalars s, double sum_of_squares, double loss,
                                                 const Settings& settings) {
  const double norm = sqrt(sum_of_squares) * s.gradient_scale;
  const bool finite = norm - norm == 0.0 && loss - loss == 0.0;
  s.made = finite ? 1.0 : 0.0;
  s.gradient_norm = finite ? norm : NAN;
  if (!finite) return s;
  s.updates += 1.0;
  s.gradient_factor = s.gradient_scale;
  if (settings.clip_norm > 0.0 && norm > settings.clip_norm) s.gradient_factor *= settings.clip_norm / norm;
  const double correction1 = 1.0 - pow(settings.beta1, s.updates);
  const double correction2 = sqrt(1.0 - pow(settings.beta2, s.updates));
  s.rate = s.learning_rate * correction2 / correction1;
  s.floor = settings.epsilon * correction2;
  return s;
}

}  // namespace flashgla::ops::adamw
