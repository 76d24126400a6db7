#ifndef JAXZERO_CPU_FLOAT_ENVIRONMENT_H_
#define JAXZERO_CPU_FLOAT_ENVIRONMENT_H_

#include <cfenv>

namespace jaxzero {

// Gradual underflow and rounding to nearest, whatever the thread is set to:
// XLA's pool flushes subnormals, a calling thread may not, and results must not
// depend on which thread takes which chunk.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace jaxzero

#endif  // JAXZERO_CPU_FLOAT_ENVIRONMENT_H_
